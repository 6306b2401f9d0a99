"""What all sections of the configuration have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Settings that cannot be changed once they are read, and that have no others beside them."""

    model_config = ConfigDict(extra="forbid", frozen=True)
