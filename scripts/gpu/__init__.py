"""One command for a machine with a GPU: ``make gpu``, or ``python -m scripts.gpu --out FOLDER``.

Needs torch, transformers and peft alone; what else is missing is said in the records. Everything
that touches the device runs in processes of its own, each with a time limit, so that neither a hang
nor an illegal access spoils what comes after.
"""
