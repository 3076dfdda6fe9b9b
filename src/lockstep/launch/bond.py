"""Started in place of a rank's command, by its path: has the process end with its agent, and becomes the command."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Replace this process by ``command``, which the system kills when the process ``parent`` ends.

    An agent may be killed at any moment, and its ranks would go on without it. The bond holds from before the first
    line of the script, whatever the script imports. On systems other than Linux there is none.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the bond was made
            os._exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
