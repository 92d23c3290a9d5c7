"""The parts with which twins fit into other libraries; `twinboot.integrations` puts them together.

for scikit-learn   estimator.py, rows.py
for Lightning      wrapper.py, lending.py, means.py, epochs.py, limits.py
for Hugging Face   pairs.py, pretrained.py, resuming.py, trainers.py
"""
