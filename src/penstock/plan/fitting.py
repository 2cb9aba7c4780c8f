"""What a model's steps need, the largest chunk that a budget allows, and the smallest budget that allows any."""

from dataclasses import dataclass

from penstock.errors import PromptError, SettingError
from penstock.plan.activation import step_memory
from penstock.plan.activation_parts import REFERENCE, StepMemory
from penstock.plan.checks import check_int
from penstock.plan.model import ModelShape
from penstock.plan.sizing import SizeRules
from penstock.plan.step import StepShape, Workspace
from penstock.plan.units import format_bytes


class ActivationBudgetError(PromptError, SettingError):
    """A memory budget that a prompt cannot be read within."""


@dataclass(frozen=True)
class ActivationModel:
    """The activations of a model's steps, by arithmetic."""

    shape: ModelShape
    dtype_bytes: int
    workspace: Workspace = REFERENCE

    def step(self, step: StepShape) -> StepMemory:
        return step_memory(self.shape, step, dtype_bytes=self.dtype_bytes, workspace=self.workspace)

    def step_bytes(self, step: StepShape) -> int:
        return self.step(step).peak_bytes

    def largest_step(self, prompt_tokens: int, chunk: int, *, num_decodes: int = 0) -> StepMemory:
        """A prompt's largest step, if no chunk of it is longer than `chunk`, with decodes beside it.

        A step needs more the longer it is and the more lies before it, and the last one has logits, so the bound is a
        chunk of full length that ends the prompt: as long as any, wherever chunks are cut. Decodes are taken to be as
        long as the prompt.
        """
        check_int("prompt_tokens", prompt_tokens, 1)
        size = min(check_int("chunk", chunk, 1), prompt_tokens)
        step = StepShape.of_chunk(
            size,
            prompt_tokens - size,
            num_decodes=check_int("num_decodes", num_decodes, 0),
            decode_pasts=num_decodes * prompt_tokens,
            is_last=True,
        )
        return self.step(step)

    def largest_chunk(
        self,
        prompt_tokens: int,
        budget_bytes: int,
        *,
        grid: int = 1,
        num_decodes: int = 0,
        most: int | None = None,
    ) -> int | None:
        """The largest chunk, a multiple of `grid` of `most` tokens at most, whose every step fits the budget; None
        where not even one of `grid` tokens does. Where the whole prompt fits, that is its length, rounded up to the
        grid."""
        check_int("budget_bytes", budget_bytes, 0)
        check_int("grid", grid, 1)

        def fits(num_grids: int) -> bool:
            step = self.largest_step(prompt_tokens, num_grids * grid, num_decodes=num_decodes)
            return step.peak_bytes <= budget_bytes

        if not fits(1):
            return None
        whole = -(-prompt_tokens // grid)
        # Peaks never fall as chunks grow: chunks up to `low` grids fit, those above `high` do not, or are not asked
        # for.
        low, high = 1, whole if most is None else max(1, min(whole, check_int("most", most, 1) // grid))
        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle):
                low = middle
            else:
                high = middle - 1
        return low * grid

    def smallest_budget(self, prompt_tokens: int, *, grid: int = 1, num_decodes: int = 0) -> int:
        """The least budget with which `largest_chunk` finds a chunk: that of chunks of `grid` tokens."""
        return self.largest_step(
            prompt_tokens, check_int("grid", grid, 1), num_decodes=num_decodes
        ).peak_bytes

    def check(self, rules: SizeRules, num_prompt: int, *, num_decodes: int = 0) -> None:
        """Refuse a prompt that cannot be read within the budget, with so many decodes beside each chunk: say the
        smallest budget that would do, and the largest chunk that fits if the chunk is fixed."""
        budget = rules.max_activation_bytes
        if budget is None:
            return
        fixed = None if rules.fixed is None else min(rules.fixed or num_prompt, num_prompt)
        needed = self.smallest_budget(num_prompt, grid=fixed or rules.grid, num_decodes=num_decodes)
        if needed <= budget:
            return
        largest = self.largest_chunk(num_prompt, budget, grid=rules.grid, num_decodes=num_decodes)
        what = "the smallest chunk" if fixed is None else f"a chunk of {fixed}"
        beside = f" beside {num_decodes} decodes" if num_decodes else ""
        smaller = f", or use a chunk of {largest} at most" if largest is not None else ""
        raise ActivationBudgetError(
            f"max_activation={format_bytes(budget)} is not accepted for a prompt of {num_prompt} tokens: {what} "
            f"needs {format_bytes(needed)}{beside}; give at least {needed} bytes{smaller}"
        )
