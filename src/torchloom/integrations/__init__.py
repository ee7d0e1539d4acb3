"""torchloom inside frameworks: Accelerate, Hugging Face's Trainer, Lightning.

Each module imports its own framework, and nothing of torchloom imports this package: install the framework with
its extra (`pip install 'torchloom[accelerate]'`, `[hf]`, `[lightning]`) and import the module by its full name.
No framework is patched: all is done in subclasses, by methods that the frameworks let one override.
`tests/integrations/test_signatures.py` holds the signature of each.
"""
