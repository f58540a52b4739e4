"""The whole library on a GPU: parity with FSDP2, memory, copies under compute (``make gpu``).

Without a GPU each test runs on the CPU, at sizes at which it shows that it runs and no more.
"""
