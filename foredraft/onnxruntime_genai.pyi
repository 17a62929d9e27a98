from decoder.plugins.onnxruntime_genai.genai_loop import DraftingLoop as DraftingLoop
