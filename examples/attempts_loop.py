"""A loop around a block of code, for when there is no function to decorate; and an outcome instead of an exception."""

from pathlib import Path
from threading import Timer

import reefknot as rk

policy = rk.RetryPolicy(max_attempts=20, base_delay=0.02, max_delay=0.05)
retrier = rk.Retrier(policy, on=FileNotFoundError, name="report")
report = Path("report.txt")
report.unlink(missing_ok=True)
Timer(0.1, report.write_text, ["all is well"]).start()

for attempt in retrier.attempts():
    with attempt:
        attempt.value = report.read_text()
print(f"attempt {attempt.number} read {attempt.value!r}; {len(attempt.history)} before it failed")
report.unlink()

outcome = retrier.using(attempts=3).run(report.read_text)
print(f"ok={outcome.ok} attempts={outcome.attempts} reason={outcome.reason}")
for record in outcome.history:
    waited = "" if record.delay is None else f", then waited {record.delay:.2f} s"
    print(f"  {record.number}: {record.failure.exception}{waited}")
