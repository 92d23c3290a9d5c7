"""The paper's experiments, and the data sets and networks that they use.

`registry` lists the experiments. They need the extra `cli`; `datasets` and `networks` do not, so nothing is imported
here.
"""
