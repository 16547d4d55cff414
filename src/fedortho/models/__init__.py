"""Networks: the zoo, their layers in forward order, what can be edited, and the patches that edit it."""
