"""The launches of the Hopper kernels for offline compilation. Nothing runs, and the tensors may be meta tensors."""

from ...request import BackwardInputs, Gpu, Request
from ..common.kernel_call import new_gradients, new_max_logit, new_results
from ..common.launch import OFFLINE_PROCESSORS, DeviceMemory, Launch, Target
from ..common.sinks import named_sink_launches
from . import backward_launches, launches


def offline_launches(request: Request, gpu: Gpu, backward: bool) -> dict[str, Launch]:
    """All launches of a forward or backward by name."""
    target, memory = Target(gpu, OFFLINE_PROCESSORS), DeviceMemory(request.q.device)
    out, lse = new_results(request, memory)
    if not backward:
        return launches.named_launches(request, (out, lse, new_max_logit(request, memory)), target, memory)
    bwd_inputs = BackwardInputs(out, lse, out, None)
    grads = new_gradients(request, memory)
    found = backward_launches.named_launches(request, bwd_inputs, grads, target, memory)
    return found | named_sink_launches(request, bwd_inputs, target, memory)
