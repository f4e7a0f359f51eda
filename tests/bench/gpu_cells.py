"""Runs the cells of gpu.py. It imports no torch, so that its test starts quickly."""
import gc
import json
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context


class Report:
    """Runs cells in a process of their own, and prints each result at once as a line of JSON.

    No cell stops the others: after an error or too much time, the next one gets a new process, because the GPU may
    accept nothing more from the old one.
    """

    def __init__(self):
        self.start, self.worker = time.perf_counter(), None

    def cell(self, section: str, name: str, function: Callable[[], dict], limit: float, end: float) -> None:
        """Print what the function returns, or why there is no result. end: when it must end, in seconds since start."""
        begin = time.perf_counter()
        left = end - (begin - self.start)
        result = self.run(function, min(left, limit)) if left >= 1 else {"skipped": "no time is left"}
        if "error" in result:
            self.close()
        result |= {"took": round(time.perf_counter() - begin, 2)}
        print(json.dumps({"section": section, "cell": name, **result}), flush=True)

    def run(self, function: Callable[[], dict], limit: float) -> dict:
        """What the function returns in the process, within the limit."""
        try:
            if self.worker is None:
                context = get_context("spawn") # a fork could not use the GPU
                self.connection, other = context.Pipe()
                self.worker = context.Process(target=run_functions, args=(other,), daemon=True)
                self.worker.start()
                other.close()
                self.connection.recv() # it has imported gpu.py, which is not the cell's time
            self.connection.send(function)
            return self.connection.recv() if self.connection.poll(limit) else {"error": f"stopped after {limit:.0f} s"}
        except (EOFError, OSError):
            self.worker.join()
            return {"error": f"the process ended with status {self.worker.exitcode}"}

    def close(self) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.kill()
            self.worker.join()
            self.worker = None


def run_functions(connection) -> None:
    """Call each function that arrives, and send back what it returns, or its error."""
    sys.stdout = sys.stderr # standard output is for results only
    connection.send("ready")
    while True:
        try:
            result = connection.recv()()
        except Exception as error: # of any kind: later cells must run
            result = {"error": f"{type(error).__name__}: {error!s:.300}"}
        gc.collect() # what this cell leaves must not count for the next one
        connection.send(result)
