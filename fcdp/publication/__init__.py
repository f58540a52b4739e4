"""Changes of a trainer, in files that those who generate with the model follow."""
