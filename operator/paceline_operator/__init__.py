"""The operator: reconciles InferenceServices into batching pods and tunes their knobs."""
