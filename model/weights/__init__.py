"""Weights in files: found, read, converted, checked, loaded into models, and written.

| file | what it does |
| --- | --- |
| find_weights | finds the file of weights of a run, a checkpoint, a folder or a model of the Hub |
| other_models | tells folders of other libraries |
| hub | downloads models from the Hugging Face Hub, and uploads them |
| tensor_files | reads and writes safetensors and PyTorch files, which may be damaged or malicious |
| external_layouts | converts weights of the authors, VideoMAE, Hugging Face and timm |
| read_config | learns a model's configuration from its run, its metadata or its shapes |
| pretrained | loads weights with their configuration, checks both, and saves them |
| load_model | makes encoders for inference from a path |
| warm_start | starts a new model of another shape from weights |
"""
