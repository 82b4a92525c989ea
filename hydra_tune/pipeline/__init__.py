"""One model across several devices at once: stages that hand micro-batches to each other."""
