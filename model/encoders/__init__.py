"""Frozen encoders of clips, whoever trained them, behind one interface.

| file | what it does |
| --- | --- |
| encoder | defines the interface: clips of uint8 go in, tokens and their means come out |
| open_encoder | opens the encoder that a path or a name on the Hugging Face Hub stands for |
| own | adapts weights of this project, of the authors and of VideoMAE |
"""
