LoRARequest = None
