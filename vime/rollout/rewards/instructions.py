"""Instructions whose following can be checked by a program, as in IFBench and IFEval; checked by if-verifiable."""

from __future__ import annotations

from typing import Any

from if_verifiable.common import evaluate_instructions
from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as IFBENCH
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as IFEVAL

from vime.errors import RewardError
from vime.rollout.rewards.answers import Answer

_KNOWN: dict[str, Any] = {**IFEVAL, **IFBENCH}


def ifbench(answer: Answer) -> float:
    """1 when the response follows every instruction of the record as it stands (strict), else 0.

    `metadata["instruction_id_list"]` names the instructions, `metadata["kwargs"]` has the arguments of each.

    Raises:
        RewardError: the record names none or an unknown one, or has another number of arguments.
    """
    names, arguments = answer.metadata.get("instruction_id_list"), answer.metadata.get("kwargs")
    if not isinstance(names, list) or not names or not isinstance(arguments, list) or len(names) != len(arguments):
        raise RewardError(
            f"the record's metadata has instruction_id_list {names!r} and kwargs {arguments!r}, allowed: two lists of "
            "the same length.",
            next_step="Name the field that holds them with --metadata-key.",
            reason="reward_label",
        )
    unknown = [name for name in names if name not in _KNOWN]
    if unknown:
        raise RewardError(f"unknown instructions: {unknown}.", next_step="Correct the record.", reason="reward_label")
    prompt = answer.prompt if isinstance(answer.prompt, str) else str(answer.prompt[-1].get("content", ""))
    given = [kwargs or {} for kwargs in arguments]
    _, scores = evaluate_instructions(answer.response, names, given, prompt, _KNOWN)
    return float(scores.binary_strict)
