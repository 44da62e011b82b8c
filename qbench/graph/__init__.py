"""The model as an ONNX graph: load and save it, find its layers, cut it, tap it."""
