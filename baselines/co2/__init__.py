"""CO2 (arXiv 2401.16265): local steps, whose average arrives while the next ones are computed.

Local SGD and SlowMo are settings of the same code, whose average is waited for.
"""
