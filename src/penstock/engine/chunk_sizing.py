"""What the steps of a model need, and the budgets that are refused before any work."""

from dataclasses import replace

from penstock.errors import PromptError, SettingError
from penstock.models.decoder import Decoder
from penstock.models.shape import model_shape, workspace_of
from penstock.plan.activation import step_memory
from penstock.plan.fitting import largest_chunk, smallest_budget
from penstock.plan.sizing import SizeRules
from penstock.plan.step_shape import StepShape
from penstock.plan.units import format_bytes


class ActivationBudgetError(PromptError, SettingError):
    """A memory budget that a prompt cannot be read within."""


class ActivationModel:
    """What the steps of a loaded model need, by arithmetic. `joins_past` says that a sequence may lie in several
    places of the cache, as those of a service do."""

    def __init__(self, model: Decoder, *, joins_past: bool = False) -> None:
        self._shape = model_shape(model.config)
        self._dtype_bytes = model.dtype.itemsize
        self._workspace = replace(workspace_of(model), joins_past=joins_past)

    def step_bytes(self, step: StepShape) -> int:
        memory = step_memory(self._shape, step, dtype_bytes=self._dtype_bytes, workspace=self._workspace)
        return memory.peak_bytes

    def check(self, rules: SizeRules, num_prompt: int, *, num_decodes: int = 0) -> None:
        """Refuse a prompt that cannot be read within the budget, with so many decodes beside each chunk: say the
        smallest budget that would do, and the largest chunk that fits if the chunk is fixed."""
        budget = rules.max_activation_bytes
        if budget is None:
            return
        fixed = None if rules.fixed is None else min(rules.fixed or num_prompt, num_prompt)
        needed = smallest_budget(
            self._shape,
            num_prompt,
            dtype_bytes=self._dtype_bytes,
            workspace=self._workspace,
            grid=fixed or rules.grid,
            num_decodes=num_decodes,
        )
        if needed <= budget:
            return
        largest = largest_chunk(
            self._shape,
            num_prompt,
            budget,
            dtype_bytes=self._dtype_bytes,
            workspace=self._workspace,
            grid=rules.grid,
            num_decodes=num_decodes,
        )
        what = "the smallest chunk" if fixed is None else f"a chunk of {fixed}"
        beside = f" beside {num_decodes} decodes" if num_decodes else ""
        smaller = f", or use a chunk of {largest} at most" if largest is not None else ""
        raise ActivationBudgetError(
            f"max_activation={format_bytes(budget)} is not accepted for a prompt of {num_prompt} tokens: {what} "
            f"needs {format_bytes(needed)}{beside}; give at least {needed} bytes{smaller}"
        )
