# Shared by the scripts: where things are, and what must be installed before anything runs.
# Sourced, never run. Everything here is idempotent and quick when the work is done already.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV="$ROOT/.venv"
BASE_IMAGE=${OUTERPRODUCT_BASE_IMAGE:-outerproduct-base:latest}
export DEBIAN_FRONTEND=noninteractive

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# need_packages PROGRAM=PACKAGE ...: installs the Debian packages of the programs that are missing.
need_packages() {
  local missing=() pair
  for pair in "$@"; do
    command -v "${pair%%=*}" >/dev/null 2>&1 || [ -e "${pair%%=*}" ] || missing+=("${pair#*=}")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  [ "$(id -u)" = 0 ] || die "missing packages: ${missing[*]}. Install them, or run this as root."
  command -v apt-get >/dev/null || die "missing: ${missing[*]}. Install them with your package manager, then run this again."
  say "installing ${missing[*]}"
  local log
  log=$(mktemp)
  if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    die "apt-get could not install ${missing[*]}"
  fi
  rm -f "$log"
}

# drop_stale_pidfile FILE PROGRAM: an engine that was killed leaves its process id behind. When another program has that
# id by now, Docker would take the engine for running and refuse to start.
drop_stale_pidfile() {
  local pid
  pid=$(cat "$1" 2>/dev/null) || return 0
  [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] || rm -f "$1"
}

# need_docker: a Docker engine that answers; installs and starts one where there is none.
# With systemd the engine is the machine's service. Without (a container, a minimal machine) it is started here, and
# its process id is kept in DOCKERD_PID, so that the caller can end what it started.
need_docker() {
  DOCKERD_PID=
  if docker version >/dev/null 2>&1; then return 0; fi
  local packages=(dockerd=docker.io iptables=iptables)
  # From Debian 13 on the client is a package of its own.
  if ! command -v docker >/dev/null && apt-cache show docker-cli >/dev/null 2>&1; then packages+=(docker=docker-cli); fi
  need_packages "${packages[@]}"
  command -v docker >/dev/null || need_packages docker=docker-cli
  if docker version >/dev/null 2>&1; then return 0; fi
  if [ -d /run/systemd/system ]; then
    say "starting the Docker service"
    systemctl start docker || die "systemctl could not start docker: see journalctl -u docker"
  else
    say "starting dockerd"
    mkdir -p /var/log
    drop_stale_pidfile /var/run/docker.pid dockerd
    drop_stale_pidfile /var/run/docker/containerd/containerd.pid containerd
    # A session of its own: a Ctrl-C meant for the caller must not end the engine under its containers.
    setsid dockerd >/var/log/outerproduct-dockerd.log 2>&1 </dev/null &
    DOCKERD_PID=$!
  fi
  local deadline=$((SECONDS + 60))
  until docker version >/dev/null 2>&1; do
    [ -z "$DOCKERD_PID" ] || kill -0 "$DOCKERD_PID" 2>/dev/null || {
      tail -n 20 /var/log/outerproduct-dockerd.log >&2
      die "dockerd ended"
    }
    [ $SECONDS -lt $deadline ] || die "the Docker engine did not answer within 60 seconds"
    sleep 0.2
  done
}

# need_python EXTRA: the virtual environment with this checkout and one of its extras, renewed when
# pyproject.toml or the constraints change.
need_python() {
  local extra=$1 python=${PYTHON:-python3}
  command -v "$python" >/dev/null || need_packages "$python=python3"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$("$python" --version) is too old: OuterProduct needs Python 3.11 or later (set PYTHON=/path/to/python3.11)"
  "$python" -c 'import ensurepip, venv' 2>/dev/null || need_packages /nonexistent/ensurepip=python3-venv
  local wanted
  wanted=$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | sha256sum | cut -c1-16)
  [ -x "$VENV/bin/python" ] || {
    say "making the Python environment"
    "$python" -m venv "$VENV"
  }
  if [ ! -e "$VENV/.installed-$extra-$wanted" ]; then
    say "installing Python packages [$extra]"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
      --constraint "$ROOT/constraints.txt" --editable "$ROOT[$extra]" || die "pip could not install the packages"
    touch "$VENV/.installed-$extra-$wanted"
  fi
}

# need_base_image: an image with Python under the name $BASE_IMAGE. Pulled where a registry is reachable, else built
# from Debian's packages, so that a machine behind a mirror works too.
need_base_image() {
  docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 && return 0
  if [ -z "${OUTERPRODUCT_OFFLINE:-}" ]; then
    # The caller's own minor version: functions of a script go by value, which takes the same on both sides.
    local slim
    slim=python:$("${PYTHON:-python3}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-slim
    say "pulling $slim"
    if timeout 300 docker pull --quiet "$slim" >/dev/null 2>&1; then
      docker tag "$slim" "$BASE_IMAGE"
      return 0
    fi
  fi
  need_packages mmdebstrap=mmdebstrap
  local suite
  suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")
  say "no registry: building $BASE_IMAGE from Debian packages ($suite)"
  local tar
  tar=$(mktemp --suffix=.tar)
  mmdebstrap --quiet --variant=minbase --include=python3,ca-certificates \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' "$suite" "$tar" || die "mmdebstrap could not build the base image"
  docker import "$tar" "$BASE_IMAGE" >/dev/null
  rm -f "$tar"
}
