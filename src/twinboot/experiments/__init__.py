"""The paper's experiments, and the data sets and networks that they use.

`registry` lists the experiments. Importing this package imports none of them: they need pandas and matplotlib, which
`datasets` and `networks` do not.
"""
