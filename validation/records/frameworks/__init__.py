"""What users reach at ``pipeproof.deepspeed`` and so on: steps that pipeproof starts, and steps of running jobs."""
