"""Fuyou: parameters, optimizer state and activations on SSD, behind one device.

What is computed is what AdamW in memory computes, bit for bit.
"""
