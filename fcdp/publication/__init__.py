"""What a trainer has changed, in files that those who generate with the model follow."""
