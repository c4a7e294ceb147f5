"""The launches of the portable kernels for offline compilation. Nothing runs, and the tensors may be meta tensors."""

from ...request import BackwardInputs, Gpu, Request
from ..common.kernel_call import new_gradients, new_max_logit, new_results
from ..common.launch import OFFLINE_PROCESSORS, DeviceMemory, Launch, Target
from ..common.sinks import named_sink_launches
from .backward_launches import named_launches
from .fp8_launches import fp8_forward_launches
from .launches import forward_launches


def offline_launches(request: Request, gpu: Gpu, backward: bool) -> dict[str, Launch]:
    """All launches of a forward (without splits) or backward by name."""
    target, memory = Target(gpu, OFFLINE_PROCESSORS), DeviceMemory(request.q.device)
    out, lse = new_results(request, memory)
    if request.spec.precision is not None:
        return fp8_forward_launches(request, out, lse, target, memory, new_max_logit(request, memory))
    if not backward:
        return forward_launches(request, out, lse, target, memory, 1, new_max_logit(request, memory))
    bwd_inputs = BackwardInputs(out, lse, out, None)
    found = named_launches(request, bwd_inputs, new_gradients(request, memory), target, memory)
    return found | named_sink_launches(request, bwd_inputs, target, memory)
