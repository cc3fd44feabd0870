"""What this repository takes from `transformers`, each name from the module that defines it.

The library's own `__init__.py` imports every model if a type checker asks: 2,200 files, more than a
third of what pyright would read. Pyright reports a name that is missing here.
"""

from transformers.data.data_collator import default_data_collator as default_data_collator
from transformers.generation.utils import GenerationMixin as GenerationMixin
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as CONFIG_MAPPING
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.image_processing_auto import AutoImageProcessor as AutoImageProcessor
from transformers.models.auto.modeling_auto import AutoModel as AutoModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    AutoModelForMultimodalLM as AutoModelForMultimodalLM,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)
from transformers.trainer import Trainer as Trainer
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.training_args import TrainingArguments as TrainingArguments

__version__: str
