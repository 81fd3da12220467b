"""Frozen encoders of clips, whoever trained them, behind one interface.

| file | what it does |
| --- | --- |
| encoder | defines the interface: clips of uint8 go in, tokens and a vector per clip come out |
| open_encoder | opens the encoder that a path or a name on the Hugging Face Hub stands for |
| own | adapts weights of this project, of the authors and of VideoMAE |
| vjepa2, videoprism, vivit, timesformer | adapt video models of transformers |
| vjepa2_1 | reads the files of V-JEPA 2.1 |
| images | makes an encoder of clips of an image model, frame by frame |
| transformers_images, timm_images | adapt image models of transformers and timm |
| transformers_models, folders | load models from the folders of these libraries |
| probe | trains a classifier on an encoder of another architecture, in train.py |
| teacher | lets a student learn the features of an encoder |
| normalization | rescales and normalizes frames as each model was trained |
"""
