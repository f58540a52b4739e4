"""Other people's trainers, as they are pinned in constraints-clients.txt, beside FSDP2."""
