"""Compares encoders on labeled videos with each other, and with what needs no encoder.

| file | what it does |
| --- | --- |
| splits | opens the shards of both sides, and refuses those that cannot be compared |
| candidates | extracts features of every model, and of what is made by hand, into a folder |
| classify | classifies the validation videos by each row's features |
| entries | the rows and the videos on which they are measured: accuracies, errors, gains |
| text | the table, what it means, and the next command |
| page | compare.html, compare.json and predictions.csv |
"""
