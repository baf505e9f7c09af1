"""What backs every figure that the documents quote; README.md says which script prints which."""
