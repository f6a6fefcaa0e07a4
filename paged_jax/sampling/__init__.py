"""How tokens are chosen.

parameters   the sampling parameters: one table, and what users pass
rows         the same for each row on the device
sampler      from logits to one token a row
"""
