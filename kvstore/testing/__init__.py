"""Shipped test doubles: real servers on free ports, clocks that stand still, and the suites that implementations must
pass.
"""
