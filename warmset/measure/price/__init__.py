"""The price of a routing policy: how different the output is, how sure that is, and what it buys.

Reading order: documents (what is scored), scorers (a model that scores windows), passes (one pass over the text),
divergence (two predictions beside each other), controls (the rounding null, random swaps), bootstrap (intervals),
work (what is kept), measurement (all passes), summary (figures and verdict), run (`warmset.price`); then sweep, budget,
free, plot, records, speed (gain beside price, on a GPU), and replay (`warmset.as_windows`).
"""

from warmset.measure.price.replay import Replay, as_windows
from warmset.measure.price.run import PriceReport, price

__all__ = ["PriceReport", "Replay", "as_windows", "price"]
