"""What all tests share: the toy decoder is imported as `toy_decoder`, plain models likewise."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

# Set before jax is first imported. Four CPU devices, for the tests on meshes. Nearly all of the time is compiling: LLVM is told
# to take less of it; what XLA makes of a program is not touched by that.
FLAGS = ("--xla_force_host_platform_device_count=4", "--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()


def pytest_terminal_summary(terminalreporter):
    """What tests measured (`record_property("measured", ...)`), also when all pass and nothing else is shown."""
    reports = [r for status in ("passed", "failed") for r in terminalreporter.stats.get(status, [])]
    lines = [value for r in reports if r.when == "call" for name, value in r.user_properties if name == "measured"]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
