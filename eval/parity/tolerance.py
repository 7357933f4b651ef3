"""How far numbers may be apart, and why.

Certificate and verifier compute in float32 from the same features, so logits of a float32 export agree to 1e-4 of the
largest one. A rounded export is compared with the same float32 logits of the trained module: it may differ by what the
rounding did to that module, which was measured at the export, step by step (`Certificate.rounding`), times two, since
an embedding in the file is rounded, too. The rounding itself has a limit, so that it cannot excuse a fault. Where two
logits are closer than that, either may be the larger: such a proposal is counted apart, all others must be equal.
"""

import torch

from eval.parity.exported import Exported
from heads.target import DTYPES, dtype_name

FLOOR = 1e-4
EPSILONS = 8  # of the dtype: what a few layers of rounded weights may add up to


def rounding_limit(*dtypes: str) -> float:
    """What computing in, or rounding to, the coarsest of these dtypes may change, as a share of the largest value."""
    return max(FLOOR, EPSILONS * max(torch.finfo(DTYPES[dtype]).eps for dtype in dtypes))


def logit_tolerance(exported: Exported) -> torch.Tensor:
    """How far draft logits of each step may be apart [K], as a share of the largest one."""
    certificate, present = exported.certificate, _dtype(exported)
    allowed_K = FLOOR + 2 * torch.tensor(certificate.rounding)
    if present != certificate.target_dtype:  # embeddings and LM head that engines take from the target
        allowed_K += rounding_limit(present, certificate.target_dtype)
    return allowed_K


def feature_tolerance(exported: Exported) -> float:
    """How far the target's features may be apart, as a share of their mean size."""
    return rounding_limit(_dtype(exported), exported.certificate.target_dtype)


def _dtype(exported: Exported) -> str:
    return dtype_name(exported.target.dtype)
