"""The stop signals of a command that runs a deployment, and what each of them asks for."""

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Handles SIGINT, SIGTERM and SIGHUP. While serving, the first signal asks for a drain and the second interrupts.
    At other times the first signal interrupts. All later ones are ignored.

    A signal to the process group or cgroup also reaches the private Ray and its actors. They leave it to this process.
    """

    def __init__(self) -> None:
        self.serving = False
        self.asked = False
        self._insisted = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def listen(self) -> None:
        """Unblocks the signals. Those that came before are handled now."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def ignore(self) -> None:
        """Ignores all signals from now on: what is still to do takes seconds."""
        self.asked = self._insisted = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.serving and not self.asked:
            self.asked = True
        elif not self._insisted:
            self._insisted = True
            raise KeyboardInterrupt
