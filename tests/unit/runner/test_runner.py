"""The runner as a process, from the Call to the outcome."""

from __future__ import annotations

import ast
import signal
from pathlib import Path

import cloudpickle
import pytest
from tests.unit.runner.fake_agent import PYTHON_VERSION, FakeAgent, pickled_in_main, receive

import outerproduct_runner

RUNNER_FILES = sorted(Path(str(outerproduct_runner.__file__)).parent.glob("*.py"))


# Which function, and what it finds.


def test_a_function_is_imported_by_its_name(agent: FakeAgent) -> None:
    assert agent.result_of("def f(a, b=1): return a + b", args=(2,), kwargs={"b": 5}) == 7
    assert agent.exit_code() == 0


def test_a_method_is_imported_by_its_qualified_name(agent: FakeAgent) -> None:
    code = "class C:\n    @staticmethod\n    def f(): return 'method'"
    assert agent.result_of(code, name="module:C.f") == "method"


def test_an_async_function_is_awaited(agent: FakeAgent) -> None:
    assert agent.result_of("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 'done'") == "done"


def test_a_function_by_value_comes_without_its_script(agent: FakeAgent) -> None:
    code = "K = 3\ndef f(x): return K * x\nif __name__ != '__main__': raise SystemExit"
    agent.start()
    agent.give_call("__main__:f", function=pickled_in_main(code), args=(2,))
    assert cloudpickle.loads(agent.take_outcome()[1]) == 6


def test_an_instance_of_a_class_by_value_comes_back(agent: FakeAgent) -> None:
    agent.start()
    agent.give_call("__main__:f", function=pickled_in_main("class C:\n    x = 4\ndef f(): return C()"))
    assert cloudpickle.loads(agent.take_outcome()[1]).x == 4


def test_a_pool_of_processes_finds_the_functions_of_main(agent: FakeAgent) -> None:
    code = (
        "from multiprocessing import get_context\ndef g(x): return x + 1\n"
        "def f():\n    with get_context('fork').Pool(2) as pool: return pool.map(g, [1, 2])"
    )
    agent.start()
    agent.give_call("__main__:f", function=pickled_in_main(code))
    header, data = agent.take_outcome()
    assert header["type"] == "result", header["message"]
    assert cloudpickle.loads(data) == [2, 3]


def test_large_arguments_and_results_pass(agent: FakeAgent) -> None:
    large = b"\x01" * 20_000_000
    assert agent.result_of("def f(x): return x", args=(large,)) == large


def test_environment_is_there_before_the_module_is_imported(agent: FakeAgent) -> None:
    code = "import os\nseen = os.environ['V']\ndef f(): return seen"
    assert agent.result_of(code, env_vars={"V": "7"}) == "7"


def test_pythonpath_of_the_image_counts_after_the_calls_own_source(agent: FakeAgent, tmp_path: Path) -> None:
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "only_image.py").write_text("where = 'image'")
    (folder / "both.py").write_text("where = 'image'")
    (agent.source / "both.py").write_text("where = 'source'")
    agent.env["PYTHONPATH"] = str(folder)
    code = "import only_image, both\ndef f(): return only_image.where, both.where"
    assert agent.result_of(code) == ("image", "source")


def test_modules_of_the_runner_shadow_nothing(agent: FakeAgent) -> None:
    (agent.source / "frames.py").write_text("mine = True")
    assert agent.result_of("import frames, sys\ndef f(): return frames.mine, sys.argv[1:]") == (True, [])


def test_the_image_keeps_its_own_cloudpickle(agent: FakeAgent) -> None:
    (agent.source / "cloudpickle.py").write_text("__version__ = 'of the image'")
    code = "def f(x):\n    import cloudpickle\n    return cloudpickle.__version__, x()"
    assert agent.result_of(code, args=(lambda: 9,)) == ("of the image", 9)


def test_a_module_imported_while_unpickling_gets_the_cloudpickle_of_the_image(agent: FakeAgent) -> None:
    (agent.source / "cloudpickle.py").write_text("__version__ = 'of the image'")
    (agent.source / "other.py").write_text("import cloudpickle\nclass T: pass\nseen = cloudpickle.__version__")
    arguments = b"\x80\x04cother\nT\n)\x81\x85}\x86."  # ((other.T(),), {})
    assert agent.result_of("def f(t):\n    import other\n    return other.seen", arguments=arguments) == "of the image"


# What can not be loaded.


def test_a_missing_module_is_named(agent: FakeAgent) -> None:
    header, _ = agent.outcome_of("import no_such_thing\ndef f(): pass")
    assert header["kind"] == "FUNCTION_NOT_LOADED"
    assert "'no_such_thing'" in header["message"]
    assert "with_uv_pip_install" in header["message"]


def test_a_function_by_value_of_another_python_is_refused_before_it_is_unpickled(agent: FakeAgent) -> None:
    agent.start()
    agent.give_call("__main__:f", function=b"not a pickle", python_version="3.99")
    header, _ = agent.take_outcome()
    assert header["kind"] == "PYTHON_VERSION_MISMATCH"
    assert "3.99" in header["message"]
    assert PYTHON_VERSION in header["message"]


def test_a_lambda_among_the_arguments_from_another_python_is_refused(agent: FakeAgent) -> None:
    header, _ = agent.outcome_of("def f(x): return x()", args=(lambda: 1,), python_version="3.99")
    assert header["kind"] == "PYTHON_VERSION_MISMATCH"


def test_plain_arguments_cross_versions_of_python(agent: FakeAgent) -> None:
    assert agent.result_of("def f(x): return x", args=([1, {"a": 2.0}],), python_version="3.99") == [1, {"a": 2.0}]


# How it ends.


def test_an_exception_comes_with_the_users_traceback(agent: FakeAgent) -> None:
    header, data = agent.outcome_of("def f(): g()\ndef g(): raise KeyError('k')")
    assert (header["kind"], header["exception_type"]) == ("EXCEPTION", "builtins.KeyError")
    assert "in g" in header["traceback"]
    assert "outerproduct_runner" not in header["traceback"]
    assert cloudpickle.loads(data).args == ("k",)
    assert agent.exit_code() == 1


def test_the_traceback_of_an_async_function_begins_at_the_users_frame(agent: FakeAgent) -> None:
    header, _ = agent.outcome_of("async def f(): raise ValueError('x')")
    assert "in f" in header["traceback"]
    assert "asyncio" not in header["traceback"]
    assert "outerproduct_runner" not in header["traceback"]


def test_an_exception_that_can_not_be_rebuilt_goes_as_text(agent: FakeAgent) -> None:
    code = "class E(Exception):\n    def __init__(self, a, b): super().__init__(a)\ndef f(): raise E('boom', 2)"
    header, data = agent.outcome_of(code)
    assert (header["exception_type"], data) == ("module.E", b"")
    assert "boom" in header["message"]


def test_system_exit_is_an_outcome(agent: FakeAgent) -> None:
    header, _ = agent.outcome_of("import sys\ndef f(): sys.exit(3)")
    assert header["exception_type"] == "builtins.SystemExit"


def test_a_result_that_can_not_be_pickled_is_named_by_type_and_place(agent: FakeAgent) -> None:
    header, _ = agent.outcome_of("import threading\ndef f(): return {'a': [1, threading.Lock()]}")
    assert header["kind"] == "RESULT_NOT_SERIALIZABLE"
    assert "result['a'][1] of type _thread.lock" in header["message"]


def test_a_result_that_holds_a_function_can_not_go_to_another_python(agent: FakeAgent) -> None:
    header, _ = agent.outcome_of("def f(): return [lambda: 1]", python_version="3.99")
    assert header["kind"] == "RESULT_NOT_SERIALIZABLE"
    assert "3.99" in header["message"]


@pytest.mark.parametrize("how", ["raise e", "raise RuntimeError('wrapped') from e"])
def test_a_full_disk_is_told_with_its_path(agent: FakeAgent, how: str) -> None:
    code = (
        "import errno\ndef f():\n    try: raise OSError(errno.ENOSPC, 'No space', '/dev/shm/x')\n"
        f"    except OSError as e: {how}"
    )
    header, _ = agent.outcome_of(code)
    assert header["kind"] == "DISK_FULL"
    assert "/dev/shm/x" in header["message"]


@pytest.mark.parametrize(
    "value", ["10 ** 5000", "type('X', (), {'__repr__': lambda self: 1 / 0})", "type('array', (list,), {})()"]
)
def test_a_result_without_a_usable_repr_is_a_result(agent: FakeAgent, value: str) -> None:
    header, _ = agent.outcome_of(f"def f(): return {value}")
    assert header["type"] == "result"


def test_a_thread_left_behind_does_not_keep_the_runner(agent: FakeAgent) -> None:
    agent.result_of("import threading, time\ndef f(): threading.Thread(target=time.sleep, args=(600,)).start()")
    assert agent.exit_code() == 0


def test_a_forked_child_that_returns_brings_no_outcome(agent: FakeAgent) -> None:
    code = (
        "import os\ndef f():\n    child = os.fork()\n    if child: os.waitpid(child, 0)\n"
        "    return 'parent' if child else 'child'"
    )
    assert agent.result_of(code) == "parent"


# SIGTERM.

SLEEPER = "import time\ndef f():\n    print('up', flush=True)\n    time.sleep(600)"


def test_the_function_may_use_sigterm_to_clean_up_undisturbed_by_another(agent: FakeAgent) -> None:
    (agent.source / "module.py").write_text(
        "import time, os, signal\ndef f():\n    try:\n        print('up', flush=True)\n        time.sleep(600)\n"
        "    except KeyboardInterrupt:\n        os.kill(os.getpid(), signal.SIGTERM)\n        return 'saved'"
    )
    agent.start()
    agent.give_call()
    assert agent.read_output(3) == b"up\n"
    agent.terminate()
    assert cloudpickle.loads(agent.take_outcome()[1]) == "saved"


def test_an_uncaught_sigterm_is_an_exception_that_the_caller_can_rebuild(agent: FakeAgent) -> None:
    (agent.source / "module.py").write_text(SLEEPER)
    agent.start()
    agent.give_call()
    assert agent.read_output(3) == b"up\n"
    agent.terminate()
    header, data = agent.take_outcome()
    assert header["exception_type"] == "builtins.KeyboardInterrupt"
    assert "SIGTERM" in header["message"]
    assert "in f" in header["traceback"]
    assert type(cloudpickle.loads(data)) is KeyboardInterrupt


def test_an_async_function_cleans_up_after_sigterm(agent: FakeAgent) -> None:
    (agent.source / "module.py").write_text(
        "import asyncio\nasync def f():\n    try:\n        print('up', flush=True)\n        await asyncio.sleep(600)\n"
        "    finally: print('saved', flush=True)"
    )
    agent.start()
    agent.give_call()
    assert agent.read_output(3) == b"up\n"
    agent.terminate()
    assert agent.read_output(6) == b"saved\n"
    assert agent.take_outcome()[0]["exception_type"] == "builtins.KeyboardInterrupt"


def test_sigterm_while_the_outcome_is_brought_does_not_lose_it(agent: FakeAgent) -> None:
    (agent.source / "module.py").write_text("def f(): return 'kept'")
    agent.start()
    agent.give_call()
    agent.accept("finished").close()
    agent.terminate()
    assert cloudpickle.loads(agent.take_outcome()[1]) == "kept"


def test_sigterm_before_the_call_ends_the_runner(agent: FakeAgent) -> None:
    agent.start()
    agent.accept("ready")
    agent.terminate()
    assert agent.exit_code() == -signal.SIGTERM


# Output.


def test_output_is_there_while_the_function_runs(agent: FakeAgent) -> None:
    (agent.source / "module.py").write_text("import time\ndef f():\n    print('.', end='')\n    time.sleep(600)")
    agent.start()
    agent.give_call()
    assert agent.read_output(1) == b"."


def test_closed_output_does_not_lose_the_outcome(agent: FakeAgent) -> None:
    assert agent.result_of("import sys\ndef f():\n    sys.stdout.close()\n    sys.stderr = None\n    return 1") == 1


# An agent that restarts.


def test_a_runner_asks_again_after_a_restart_before_it_has_accepted(agent: FakeAgent) -> None:
    (agent.source / "module.py").write_text("def f(): return 1")
    agent.start()
    agent.accept("ready").close()
    agent.restart()
    agent.give_call()
    assert cloudpickle.loads(agent.take_outcome()[1]) == 1


def test_a_runner_brings_its_outcome_again_until_it_is_received(agent: FakeAgent) -> None:
    (agent.source / "module.py").write_text("def f(): return b'x' * 3_000_000")
    agent.start()
    agent.give_call()
    connection = agent.accept("finished")
    receive(connection)
    connection.close()
    agent.restart()
    assert len(cloudpickle.loads(agent.take_outcome()[1])) == 3_000_000
    assert agent.exit_code() == 0


# The package itself.


@pytest.mark.parametrize("path", RUNNER_FILES, ids=lambda path: path.name)
def test_the_runner_has_the_syntax_of_the_oldest_python_of_an_image(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 9))


def test_the_runner_imports_the_standard_library_alone(agent: FakeAgent) -> None:
    code = "import sys\ndef f(): return sorted({name.partition('.')[0] for name in sys.modules})"
    top_level = set(agent.result_of(code))
    assert not top_level & {"cloudpickle", "outerproduct", "grpc", "google"}
    assert "outerproduct_runner" in top_level
