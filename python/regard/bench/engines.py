"""Inference engines as peers on a CPU: forward passes of OpenVINO and ONNX Runtime."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import numpy as np

from .problem import Problem
from .side import LeftOut, Side


def openvino_side(problem: Problem, which: str, name: str) -> Side:
    """A model of one `ScaledDotProductAttention`, which computes in the type of its inputs."""
    openvino, opset13 = map(import_module, ("openvino", "openvino.opset13"))
    case = problem.case
    _refuse_others(problem, which)
    if case.heads != case.heads_kv:
        raise LeftOut("keys would be repeated for each query head")
    type = getattr(openvino.Type, case.type)
    inputs = [np.ascontiguousarray(problem.given[x]) for x in "qkv"]
    parameters = [opset13.parameter(list(x.shape), type) for x in inputs]
    attend = opset13.scaled_dot_product_attention(*parameters, causal=case.causal)
    compiled = openvino.Core().compile_model(
        openvino.Model([attend], parameters), "CPU",
        {"INFERENCE_NUM_THREADS": _threads(), "INFERENCE_PRECISION_HINT": case.type,
         "PERFORMANCE_HINT": "LATENCY"})
    request = compiled.create_infer_request()
    for index, x in enumerate(inputs):
        words = x.view(np.uint16) if case.type == "bf16" else x
        request.set_input_tensor(index, openvino.Tensor(words, list(x.shape), type))

    def results() -> dict[str, Any]:
        """Without ml_dtypes at hand, OpenVINO gives bfloat16 as float16 of the same bits."""
        words = request.get_output_tensor(0).data.view(f"u{inputs[0].itemsize}")
        return {"out": words.view(inputs[0].dtype)}

    return Side(name, request.infer, results, keep=(compiled, inputs))


def onnxruntime_side(problem: Problem, which: str, name: str) -> Side:
    """A model of one `com.microsoft.MultiHeadAttention`, whose CPU kernel takes float32."""
    onnxruntime, onnx = map(import_module, ("onnxruntime", "onnx"))
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    case = problem.case
    _refuse_others(problem, which)
    if case.type != "f32":
        raise LeftOut("its CPU kernel takes float32 alone")
    if case.heads != case.heads_kv or case.columns_out != case.dim:
        raise LeftOut("only as many heads of keys as of queries, and D = Dv, are described here")
    inputs = {x: np.ascontiguousarray(problem.given[x].swapaxes(1, 2)).reshape(
        case.batch, -1, case.heads * case.dim) for x in "qkv"}
    node = helper.make_node("MultiHeadAttention", [*inputs], ["out"], domain="com.microsoft",
                            num_heads=case.heads, unidirectional=int(case.causal))
    graph = helper.make_graph(
        [node], "attention",
        [helper.make_tensor_value_info(x, float32, array.shape)
         for x, array in inputs.items()],
        [helper.make_tensor_value_info("out", float32, inputs["q"].shape)])
    model = helper.make_model(graph, ir_version=8, opset_imports=[
        helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _threads()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options,
                                           providers=["CPUExecutionProvider"])
    out = np.empty_like(inputs["q"])
    binding = session.io_binding()
    for x, array in inputs.items():
        binding.bind_cpu_input(x, array)
    binding.bind_output("out", "cpu", 0, np.float32, out.shape, out.ctypes.data)
    heads = out.reshape(case.batch, case.rows, case.heads, case.dim).swapaxes(1, 2)
    return Side(name, lambda: session.run_with_iobinding(binding), lambda: {"out": heads},
                keep=(session, inputs))


def _refuse_others(problem: Problem, which: str) -> None:
    if which == "bwd":
        raise LeftOut("computes no gradients")
    if problem.options.keys() - {"causal"}:
        raise LeftOut("has no such options here")


def _threads() -> int:
    """As many as the benchmark has left the process cores for."""
    return len(os.sched_getaffinity(0))
