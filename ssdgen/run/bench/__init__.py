"""`ssdgen bench`: the forward pass beside what others wrote, what each technique is worth, and how time grows.

rows.py says what is measured and what its JSON holds; shapes.py, ours.py, others.py and truth.py what is run and what it
is compared with; measure.py how; forward.py, ablation.py and growth.py are the three studies; pictures.py draws them.
"""
