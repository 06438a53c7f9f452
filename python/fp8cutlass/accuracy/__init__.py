"""The accuracy standard: float64 references, gates that a broken kernel cannot pass, and the command that applies them.

Three questions, three references. Is the code right? The emulator. Is the algorithm inside its theory? float64 on the
dequantised operands, element by element (``ztest``). What does the user lose? float64 on the original operands
(``measures``, held to the figures of ``standard``). ``python -m fp8cutlass.accuracy`` answers the last two.
"""
