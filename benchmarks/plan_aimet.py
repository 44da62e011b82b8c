"""AIMET's W8A8 of the run's model, its most sensitive tenth of the operators in FP16."""

from __future__ import annotations

from plan_engines import engine_file
from plan_torch import pieces

from qbench.gate import require
from qbench.workbench import Workbench

AIMET = "aimet-w8a8-fp16"
#: Share of the operators that keep FP16, in per cent.
KEPT = 10.0
#: Texts on which each operator's signal-to-noise ratio is taken.
ANALYSED = 32


def aimet_mixed(work: Workbench, name: str) -> None:
    """Calibrate W8A8, rank operators by AIMET's own analysis and export what results as Q/DQ."""
    aimet = require("aimet_onnx")
    lite_mp, told = require("aimet_onnx.lite_mp"), require("aimet_onnx.utils")
    import onnx
    import onnxruntime

    graph, feeds = onnx.load(str(work.model.path)), list(pieces(work))
    threads = {"intra_op_num_threads": work.settings.threads}
    sim = aimet.QuantizationSimModel(
        graph,
        param_type=aimet.int8,
        activation_type=aimet.int8,
        session_options_kwargs=threads,
    )
    sim.compute_encodings(feeds)
    reference = onnxruntime.InferenceSession(
        str(work.model.path), providers=["CPUExecutionProvider"]
    )
    single = [{k: v[:1] for k, v in feed.items()} for feed in feeds]  # outputs of one shape
    evaluate = told.make_psnr_eval_fn(reference, single[:ANALYSED], output_indices=0)
    scores = aimet.analyze_per_layer_sensitivity(sim, evaluate)
    lite_mp.flip_layers_to_higher_precision(sim, scores, percent_to_flip=KEPT)
    exported = sim.to_onnx_qdq(prequantize_constants=True)
    onnx.save(exported, str(engine_file(work, name)))
