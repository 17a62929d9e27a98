from decoder.plugins.vllm.proposer import ForedraftProposer as ForedraftProposer
