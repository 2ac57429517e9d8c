"""Settings of torch for a whole process that a script makes, and that the processes of its runs need as well."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TorchSettings:
    """What torch is set to in the process that makes the value; :meth:`apply` sets another process to the same."""

    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    warn_only: bool = field(default_factory=torch.is_deterministic_algorithms_warn_only_enabled)
    """Whether an operator without a deterministic form only warns."""

    def apply(self) -> None:
        """Set torch in this process to them; to be called before a model is made."""
        here = TorchSettings()
        if self.default_dtype != here.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if self.matmul_precision != here.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        # Only if it differs: the call imports torch._inductor (torch 2.13).
        if (self.deterministic, self.warn_only) != (here.deterministic, here.warn_only):
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
