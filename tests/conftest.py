"""What all tests share: the toy decoder is imported as `toy_decoder`, plain models likewise."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
