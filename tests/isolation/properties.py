"""What must hold of a container, one function each: the suite runs them on a Call of the real stack, the mutation
check on containers with one setting taken away, of which each must make at least one of them fail.

A property gets a `Look` and asserts; its name says what holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

PROPERTIES: dict[str, Callable[[Look], None]] = {}

FORBIDDEN_CAPABILITIES = {
    "AUDIT_CONTROL": 30, "AUDIT_READ": 37, "AUDIT_WRITE": 29, "BLOCK_SUSPEND": 36, "BPF": 39,
    "CHECKPOINT_RESTORE": 40, "DAC_READ_SEARCH": 2, "IPC_LOCK": 14, "IPC_OWNER": 15, "LEASE": 28,
    "LINUX_IMMUTABLE": 9, "MAC_ADMIN": 33, "MAC_OVERRIDE": 32, "MKNOD": 27, "NET_ADMIN": 12,
    "NET_BIND_SERVICE": 10, "NET_BROADCAST": 11, "NET_RAW": 13, "PERFMON": 38, "SETFCAP": 31, "SETPCAP": 8,
    "SYSLOG": 34, "SYS_ADMIN": 21, "SYS_BOOT": 22, "SYS_CHROOT": 18, "SYS_MODULE": 16, "SYS_NICE": 23,
    "SYS_PACCT": 20, "SYS_PTRACE": 19, "SYS_RAWIO": 17, "SYS_RESOURCE": 24, "SYS_TIME": 25,
    "SYS_TTY_CONFIG": 26, "WAKE_ALARM": 35,
}  # fmt: skip
"""Number of each in linux/capability.h; all there are but those of container_spec.CAPABILITIES."""

DEVICES = {"core", "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty",
           "urandom", "zero"}  # fmt: skip
"""What every container has in /dev: https://github.com/opencontainers/runtime-spec/blob/main/config-linux.md."""


@dataclass(frozen=True)
class Look:
    """What was seen from inside, and what it is held against."""

    inside: Mapping[str, Any]
    """Of `probe.look`."""
    host_config: Mapping[str, Any]
    """Of `docker inspect`."""
    cpus: frozenset[int]
    """That the Allocation has."""
    memory_bytes: int
    host_name: str
    nofile: int
    host_namespaces: Mapping[str, str] = field(default_factory=dict)
    host_secrets: tuple[str, ...] = ()
    """Keys and tokens of the stack."""
    own_folders: tuple[str, ...] = ()
    """Folders and files of the host below which all lies that may be mounted."""


def holds(check: Callable[[Look], None]) -> Callable[[Look], None]:
    """Registers a property under its function's name."""
    PROPERTIES[check.__name__] = check
    return check


def _never_done(look: Look, *names: str) -> None:
    for name in names:
        assert look.inside["calls"][name] != "done", name


# CPUs.


@holds
def sees_exactly_its_cpus(look: Look) -> None:
    assert set(look.inside["affinity"]) == look.cpus


@holds
def cannot_widen_its_cpus(look: Look) -> None:
    assert set(look.inside["affinity_after_widening"]) <= look.cpus


@holds
def children_stay_on_its_cpus(look: Look) -> None:
    assert set(look.inside["affinity_of_child"]) <= look.cpus


@holds
def threads_stay_on_its_cpus(look: Look) -> None:
    assert set(look.inside["affinity_of_thread"]) <= look.cpus


@holds
def thread_pools_are_sized_for_its_cpus(look: Look) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        assert look.inside["env"].get(name) == str(len(look.cpus)), name


@holds
def cannot_raise_its_priority(look: Look) -> None:
    _never_done(look, "raise_priority")


@holds
def cannot_become_real_time(look: Look) -> None:
    _never_done(look, "real_time")


# Memory.


@holds
def memory_is_limited_to_what_it_asked_for(look: Look) -> None:
    assert look.inside["cgroup"]["memory.max"] == str(look.memory_bytes)


@holds
def has_no_swap(look: Look) -> None:
    assert look.inside["cgroup"]["memory.swap.max"] == "0"


@holds
def shm_is_as_large_as_its_memory(look: Look) -> None:
    assert look.inside["shm_bytes"] == look.memory_bytes


@holds
def cannot_raise_its_memory_limit(look: Look) -> None:
    assert look.inside["writes"]["/sys/fs/cgroup/memory/memory.limit_in_bytes"] in {"EROFS", "ENOENT"}


@holds
def cannot_change_its_cpuset(look: Look) -> None:
    assert look.inside["writes"]["/sys/fs/cgroup/cpuset/cpuset.cpus"] in {"EROFS", "ENOENT"}


@holds
def cannot_make_cgroups(look: Look) -> None:
    assert look.inside["calls"]["make_cgroup"] == "EROFS"


@holds
def sees_no_cgroups_but_its_own(look: Look) -> None:
    # On v2 its cgroup is the root of a namespace of its own, and what lies above shows as "/..".
    for mount in look.inside["mounts"]:
        assert mount["type"] != "cgroup" or mount["root"] != "/", mount
        assert mount["type"] != "cgroup2" or not mount["root"].startswith("/.."), mount
    v2 = any(mount["type"] == "cgroup2" for mount in look.inside["mounts"])
    assert not v2 or look.inside["namespaces"]["cgroup"] != look.host_namespaces["cgroup"]


@holds
def cannot_hide_from_the_out_of_memory_killer(look: Look) -> None:
    _never_done(look, "lower_oom_score")


@holds
def cannot_add_swap(look: Look) -> None:
    assert look.inside["calls"]["swapon"] == "EPERM"


# Processes.


@holds
def processes_are_limited(look: Look) -> None:
    assert look.inside["cgroup"]["pids.max"] == "4096"


@holds
def an_init_is_the_first_process(look: Look) -> None:
    assert look.inside["processes"]["1"] in {"docker-init", "tini"}


@holds
def zombies_are_reaped(look: Look) -> None:
    assert look.inside["zombies"] == 0


@holds
def sees_no_processes_but_its_own(look: Look) -> None:
    assert not {"dockerd", "containerd", "kthreadd", "systemd"} & set(look.inside["processes"].values())
    assert len(look.inside["processes"]) <= 4


@holds
def cannot_signal_processes_beyond(look: Look) -> None:
    assert look.inside["calls"]["kill_beyond"] == "ESRCH"


@holds
def cannot_trace_processes_beyond(look: Look) -> None:
    assert look.inside["calls"]["trace_beyond"] in {"EPERM", "ESRCH"}


@holds
def writes_no_core_dumps(look: Look) -> None:
    assert list(look.inside["limits"]["CORE"]) == [0, 0]


@holds
def cannot_switch_core_dumps_on(look: Look) -> None:
    _never_done(look, "raise_core")


@holds
def may_open_as_many_files_as_the_machine_grants(look: Look) -> None:
    assert list(look.inside["limits"]["NOFILE"]) == [look.nofile, look.nofile]


@holds
def cannot_raise_its_limit_of_open_files(look: Look) -> None:
    _never_done(look, "raise_nofile")


@holds
def may_lock_memory_for_gpu_transfers(look: Look) -> None:
    assert "memlock" in {limit["Name"] for limit in look.host_config["Ulimits"] or ()}


# Privileges.


def _lacks(name: str, number: int) -> Callable[[Look], None]:
    def check(look: Look) -> None:
        for kind in ("CapBnd", "CapEff", "CapPrm", "CapInh", "CapAmb"):
            assert not int(look.inside["status"][kind], 16) >> number & 1, f"{kind} has {name}"

    check.__name__ = f"lacks_capability_{name.lower()}"
    return check


for _name, _number in FORBIDDEN_CAPABILITIES.items():
    holds(_lacks(_name, _number))


@holds
def gains_no_privileges_by_programs(look: Look) -> None:
    assert look.inside["status"]["NoNewPrivs"] == "1"


@holds
def system_calls_are_filtered(look: Look) -> None:
    assert look.inside["status"]["Seccomp"] == "2"


def _filtered(name: str) -> Callable[[Look], None]:
    def check(look: Look) -> None:
        # ENOSYS: the kernel has none, or the filter says so.
        assert look.inside["calls"].get(f"syscall_{name}", "EPERM") in {"EPERM", "ENOSYS"}

    check.__name__ = f"cannot_call_{name}"
    return check


for _name in ("add_key", "bpf", "perf_event_open", "kexec_load", "open_by_handle_at", "init_module", "iopl"):
    holds(_filtered(_name))


@holds
def cannot_mount(look: Look) -> None:
    assert look.inside["calls"]["mount"] == "EPERM"


@holds
def cannot_make_a_user_namespace(look: Look) -> None:
    assert look.inside["calls"]["unshare_user"] == "EPERM"


@holds
def cannot_make_a_mount_namespace(look: Look) -> None:
    assert look.inside["calls"]["unshare_mount"] == "EPERM"


@holds
def cannot_enter_namespaces(look: Look) -> None:
    assert look.inside["calls"]["setns_of_init"] in {"EPERM", "EACCES"}


@holds
def cannot_make_device_nodes(look: Look) -> None:
    assert look.inside["calls"]["mknod"] == "EPERM"
    assert look.inside["calls"]["mknod_in_dev"] == "EPERM"


@holds
def cannot_change_its_root(look: Look) -> None:
    assert look.inside["calls"]["chroot"] == "EPERM"


@holds
def cannot_set_the_clock(look: Look) -> None:
    assert look.inside["calls"]["set_clock"] == "EPERM"


@holds
def cannot_reboot(look: Look) -> None:
    assert look.inside["calls"]["reboot"] == "EPERM"


@holds
def cannot_read_the_kernels_log(look: Look) -> None:
    assert look.inside["calls"]["read_kernel_log"] == "EPERM"
    assert look.inside["reads"]["/dev/kmsg"] == 0


# Namespaces.


def _own_namespace(name: str) -> Callable[[Look], None]:
    def check(look: Look) -> None:
        assert look.inside["namespaces"][name] != look.host_namespaces[name]

    check.__name__ = f"has_a_{name}_namespace_of_its_own"
    return check


for _name in ("mnt", "pid", "net", "ipc", "uts"):
    holds(_own_namespace(_name))


@holds
def host_name_is_its_attempts(look: Look) -> None:
    assert look.inside["host_name"] == look.host_name


@holds
def cannot_change_the_host_name(look: Look) -> None:
    assert look.inside["calls"]["set_host_name"] == "EPERM"


@holds
def sees_no_shared_memory_of_its_neighbour(look: Look) -> None:
    assert look.inside["calls"]["shared_memory_of_neighbour"] == "ENOENT"


@holds
def reaches_no_abstract_socket_of_its_neighbour(look: Look) -> None:
    assert look.inside["calls"]["abstract_socket_of_neighbour"] == "ECONNREFUSED"
    assert look.inside["abstract_sockets"] == []


# Files.


@holds
def sees_no_files_of_its_neighbour(look: Look) -> None:
    assert "neighbour" not in look.inside["tmp"]
    assert "neighbour" not in look.inside["shm"]


@holds
def sees_no_docker_socket(look: Look) -> None:
    assert look.inside["docker_sockets"] == []


@holds
def sees_no_folders_of_the_host_but_its_own(look: Look) -> None:
    made_by_docker = {"/etc/resolv.conf", "/etc/hostname", "/etc/hosts", "/sbin/docker-init", "/usr/sbin/docker-init"}
    for mount in look.inside["mounts"]:
        if mount["source"].startswith("/dev/") and mount["target"] not in made_by_docker:
            # The root is told within its file system, which need not be the host's: the ends must do.
            ends = {"/".join(folder.split("/")[-2:]) for folder in look.own_folders}
            assert any(end in mount["root"] for end in ends), mount


@holds
def its_socket_folder_is_read_only(look: Look) -> None:
    assert look.inside["writes"]["/run/outerproduct/x"] == "EROFS"


@holds
def its_library_is_read_only(look: Look) -> None:
    assert look.inside["writes"]["/run/outerproduct/lib/x"] == "EROFS"


@holds
def its_sources_are_read_only(look: Look) -> None:
    assert look.inside["writes"]["/run/outerproduct/source/x"] in {"EROFS", "ENOENT"}


@holds
def its_socket_folder_holds_nothing_else(look: Look) -> None:
    assert set(look.inside["run_folder"]) <= {"agent.sock", "lib", "source"}


@holds
def mounts_do_not_propagate(look: Look) -> None:
    assert all(mount.get("BindOptions", {}).get("Propagation") == "rprivate" for mount in look.host_config["Mounts"])


@holds
def may_write_where_programs_expect_to(look: Look) -> None:
    assert look.inside["writes"]["/tmp/x"] == "done"


@holds
def kernel_settings_are_read_only(look: Look) -> None:
    assert look.inside["writes"]["/proc/sys/kernel/core_pattern"] == "EROFS"
    assert look.inside["writes"]["/proc/sys/vm/drop_caches"] == "EROFS"


@holds
def cannot_trigger_sysrq(look: Look) -> None:
    assert look.inside["writes"]["/proc/sysrq-trigger"] in {"EROFS", "ENOENT"}


@holds
def cannot_move_interrupts(look: Look) -> None:
    assert look.inside["writes"]["/proc/irq/default_smp_affinity"] in {"EROFS", "ENOENT"}


@holds
def sysfs_is_read_only(look: Look) -> None:
    assert look.inside["writes"]["/sys/kernel/mm/transparent_hugepage/enabled"] in {"EROFS", "ENOENT"}


@holds
def the_kernels_keys_timers_and_firmware_are_masked(look: Look) -> None:
    assert look.inside["unmasked"] == []


@holds
def cannot_read_the_kernels_memory(look: Look) -> None:
    assert look.inside["reads"]["/proc/kcore"] == 0


@holds
def what_is_masked_reads_as_nothing(look: Look) -> None:
    assert set(look.inside["reads"].values()) == {0}


@holds
def dev_holds_the_standard_devices_only(look: Look) -> None:
    assert set(look.inside["dev"]) <= DEVICES


@holds
def opens_no_disks(look: Look) -> None:
    assert look.inside["block_devices_opened"] == []


@holds
def dockers_copy_of_its_output_is_bounded(look: Look) -> None:
    log = look.host_config["LogConfig"]
    assert log["Type"] == "local"
    assert set(log["Config"]) == {"max-size", "max-file"}


@holds
def is_not_started_again_by_docker(look: Look) -> None:
    assert look.host_config["RestartPolicy"]["Name"] in {"no", ""}


# Network.


@holds
def has_a_network_of_its_own(look: Look) -> None:
    assert look.inside["interfaces"] == ["eth0", "lo"]


@holds
def cannot_reach_its_neighbour(look: Look) -> None:
    assert look.inside["connects"]["neighbour"] != "done"


@holds
def cannot_reach_the_hosts_loopback(look: Look) -> None:
    assert look.inside["connects"]["scheduler on loopback"] == "ECONNREFUSED"
    assert look.inside["connects"]["agent on loopback"] == "ECONNREFUSED"


@holds
def cannot_reach_scheduler_or_agent_by_the_gateway(look: Look) -> None:
    assert look.inside["connects"]["scheduler by gateway"] != "done"
    assert look.inside["connects"]["agent by gateway"] != "done"


@holds
def cannot_reach_the_metadata_service(look: Look) -> None:
    assert look.inside["connects"]["metadata"] == "ECONNREFUSED"


@holds
def reaches_name_servers_at_the_metadata_address(look: Look) -> None:
    assert look.inside["connects"]["name server"] == "done"


@holds
def cannot_make_raw_sockets(look: Look) -> None:
    assert look.inside["calls"]["raw_socket"] == "EPERM"


@holds
def cannot_make_packet_sockets(look: Look) -> None:
    assert look.inside["calls"]["packet_socket"] == "EPERM"


@holds
def cannot_change_routes(look: Look) -> None:
    assert look.inside["calls"]["add_route"] == "EPERM"


# Environment and GPUs.


@holds
def environment_holds_no_key_of_the_stack(look: Look) -> None:
    text = "\n".join(look.inside["env"].values())
    assert not [secret for secret in look.host_secrets if secret in text]


@holds
def environment_names_nothing_of_the_host(look: Look) -> None:
    ours = {name for name in look.inside["env"] if name.startswith(("OUTERPRODUCT", "DOCKER"))}
    assert ours <= {"OUTERPRODUCT_SOCKET", "OUTERPRODUCT_ATTEMPT"}


@holds
def without_gpus_none_is_visible_whatever_the_image_says(look: Look) -> None:
    assert look.inside["env"]["NVIDIA_VISIBLE_DEVICES"] == "void"


@holds
def gpu_indices_of_the_image_are_dropped(look: Look) -> None:
    assert "CUDA_VISIBLE_DEVICES" not in look.inside["env"]


@holds
def gpus_are_ordered_by_bus(look: Look) -> None:
    assert look.inside["env"].get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
