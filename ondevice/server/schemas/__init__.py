"""Bodies of requests and responses, one file per subject. Their docstrings are the API's reference."""

from ondevice.server.schemas.adapters import (
    Active,
    Adapter,
    Conversion,
    ExitForm,
    TaskResponse,
)
from ondevice.server.schemas.answers import (
    FeedbackRequest,
    GenerateRequest,
    GenerateResponse,
    Message,
    NotPredicted,
    PredictedRow,
    PredictRequest,
    PredictResponse,
    Thumb,
    ThumbCounts,
    ThumbRequest,
)
from ondevice.server.schemas.common import (
    Done,
    ErrorResponse,
    ResponseBody,
)
from ondevice.server.schemas.data import (
    Artifact,
    Chosen,
    Columns,
    Dataset,
    MethodRequest,
    MethodWords,
    Model,
    ModelList,
    Placed,
    PreviewRequest,
    RowForm,
    Settings,
    Table,
    TableRequest,
    TemplateForm,
    Upload,
)
from ondevice.server.schemas.jobs import (
    JobPatch,
    JobResponse,
    PlanResponse,
)
from ondevice.server.schemas.system import (
    Gpu,
    Health,
    MetricsResponse,
    RunningFigures,
    SessionKey,
    SessionRequest,
    System,
)
