"""What an evaluation says, in one sentence that does not flatter."""

from typing import Any

Summary = dict[str, Any]

LEAVE_OFF = 1.2  # below this speedup the heads do not repay their memory and their upkeep
WORTHWHILE = 1.5
FEW_PROMPTS = 5
EXACT_DTYPES = {"float32", "float64", "fp32", "fp64"}


def verdict(summary: Summary) -> str:
    """One sentence: use the heads or not, with tau, speedup and interval, and what qualifies them."""
    speedup = summary["speedup"]
    interval = f"{speedup['median']:.2f}x [{speedup['low']:.2f}, {speedup['high']:.2f}]"
    numbers = (
        f"tau is {summary['tau']:.2f} and decoding runs at {interval} the speed of the fastest plain decoding"
        f" ({summary['fastest_plain']})"
    )
    notes = [note for note in (_interval_note(summary), _dtype_note(summary), _output_note(summary)) if note]
    return "; ".join([f"{_advice(speedup['median'])}: {numbers}", *notes]) + "."


def _advice(speedup: float) -> str:
    if speedup < LEAVE_OFF:
        return "Leave the heads off"
    return "The heads help a little" if speedup < WORTHWHILE else "The heads are worth serving"


def _interval_note(summary: Summary) -> str:
    if len(summary["prompts"]) < FEW_PROMPTS:
        return f"fewer than {FEW_PROMPTS} prompts were measured, so the interval means little"
    if summary["speedup"]["low"] < LEAVE_OFF <= summary["speedup"]["median"]:
        return f"the interval reaches below {LEAVE_OFF}x, so measure more prompts before relying on it"
    return ""


def _dtype_note(summary: Summary) -> str:
    rates = summary["plain_settings"]
    fastest = max(rates, key=lambda name: rates[name])
    if rates[fastest] <= rates[summary["fastest_plain"]]:
        return ""
    speedup = summary["speedup_any_dtype"]["median"]
    slower = ", slower than without heads" if speedup < 1 else ""
    return f"against plain decoding in another dtype ({fastest}) it is {speedup:.2f}x{slower}"


def _output_note(summary: Summary) -> str:
    rule, equality = summary["acceptance"], summary["equality"]
    if not summary["lossless"]:
        return f"{rule} acceptance is lossy, so the output is not distributed as the target's"
    if summary["greedy_equal"] is None:
        return f"{rule} output was not compared token by token"
    if summary["greedy_equal"]:
        return f"the output equals plain greedy decoding on all {equality['compared']} prompts"
    differing = f"{equality['compared'] - equality['equal']} of {equality['compared']} prompts"
    dtype = summary["settings"]["dtype"]
    margin = equality["largest_margin"]
    shown = "unknown" if margin is None else f"{margin:.3g}"
    where = f"in {dtype} the output leaves plain greedy decoding on {differing}"
    if dtype in EXACT_DTYPES:
        return f"{where}, which is a bug (largest top-2 logit margin there: {shown})"
    return f"{where}, the largest top-2 logit margin there being {shown}"
