"""AutoML: from a table to a tuned, ensembled model.

    reading → target, schema → encoder (for each fold) → prepared → study of families → members → predictor

A fit is an ordinary study of the families for tables (`search_spaces/`), so all that works on a study works on it. Its
directory holds what the study trains on and, at the end, a predictor: JSON and safetensors, no pickle.
"""
