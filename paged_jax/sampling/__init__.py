"""How tokens are chosen.

parameters   the sampling parameters: one table, and what users pass
rows         the same for each row on the device
streams      random numbers of a seed and a position
sampler      from logits to one token a row
"""
