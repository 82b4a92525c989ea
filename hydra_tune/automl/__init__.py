"""AutoML: from a table to a tuned, ensembled model.

    reading → target, schema → encoder (for each fold) → prepared → study of families → members → predictor

A fit is an ordinary study of the families for tables (`search_spaces/`), so everything that works on a study works on a
fit. Its directory holds the study's data and, at the end, a predictor: JSON and safetensors, no pickle.
"""
