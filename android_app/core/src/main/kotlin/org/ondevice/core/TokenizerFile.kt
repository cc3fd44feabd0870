package org.ondevice.core

import java.io.File
import java.io.IOException
import java.text.Normalizer

/**
 * Reads `tokenizer.json` (and `tokenizer_config.json`, `chat_template.jinja` beside it).
 *
 * Taken are: BPE whose words are bytes (a `ByteLevel` pre-tokenizer), the pre-tokenizers `ByteLevel`, `Digits`,
 * `Split` by the pattern of GPT-2, Llama 3 or Qwen 2 and `Sequence`; the normalizers NFC, NFD, NFKC, NFKD and
 * `Sequence`; the post-processors `ByteLevel`, `TemplateProcessing` and `Sequence`. Anything else is refused by name.
 */
object TokenizerFile {
    private const val NAME = "tokenizer.json"

    /** @param folder the artifact's `tokenizer` folder. */
    fun read(folder: File): Tokenizer {
        val file = Fields.parse(text(File(folder, NAME)), NAME)
        val configFile = File(folder, "tokenizer_config.json")
        val config = if (configFile.isFile) Fields.parse(text(configFile), configFile.name) else null
        val templateFile = File(folder, "chat_template.jinja")
        val template = if (templateFile.isFile) text(templateFile) else config?.raw("chat_template") as? String
        return build(file, config, template)
    }

    private fun build(file: Fields, config: Fields?, template: String?): Tokenizer {
        val normalizer = normalizer(file.fieldsOrNull("normalizer"))
        val preTokenizer = file.fieldsOrNull("pre_tokenizer") ?: throw notByteLevel("no pre_tokenizer")
        if (!isByteLevel(preTokenizer)) throw notByteLevel(preTokenizer.text("type"))
        if (file.has("decoder") && !isByteLevel(file.fields("decoder"))) throw notByteLevel("decoder ${file.fields("decoder").text("type")}")
        val vocabulary = vocabulary(file.fields("model"))
        val named = config?.let(::namedTokens) ?: emptyMap()
        val added = file.objects("added_tokens").map { added(it, named.values.flatten().toSet()) }
        val idOf = { token: String? -> token?.let { added.firstOrNull { known -> known.content == it }?.id ?: vocabulary[it] } }
        val around = IntList() to IntList()
        file.fieldsOrNull("post_processor")?.let { postProcessor(it, around.first, around.second) }
        val eosToken = named["eos_token"]?.firstOrNull()
        val eosId = idOf(eosToken)
        return Tokenizer(
            bpe(file.fields("model"), vocabulary), AddedTokens(added, normalizer), normalizer, splitter(preTokenizer),
            around.first.toArray(), around.second.toArray(),
            bosId = idOf(named["bos_token"]?.firstOrNull()),
            eosId = eosId,
            eosToken = eosToken.takeIf { eosId != null },
            padId = idOf(named["pad_token"]?.firstOrNull()) ?: eosId ?: 0,
            chatTemplate = template,
            specialIds = added.filter { it.special }.map { it.id }.toSet(),
        )
    }

    private fun vocabulary(model: Fields): Map<String, Int> {
        if (model.text("type") != "BPE") throw unsupported("model", "BPE", model.text("type"))
        for (key in listOf("continuing_subword_prefix", "end_of_word_suffix")) {
            if (!(model.raw(key) as? String).isNullOrEmpty()) throw unsupported("model.$key", "nothing", model.raw(key))
        }
        if (model.has("dropout") && model.double("dropout") != 0.0) throw unsupported("model.dropout", "0", model.raw("dropout"))
        val found = HashMap<String, Int>()
        for ((token, id) in model.map("vocab")) {
            found[token] = (id as? Long)?.takeIf { it in 0..(1L shl 24) }?.toInt() ?: throw model.wrong("vocab.$token", "an id", id)
        }
        if (found.isEmpty()) throw model.wrong("vocab", "tokens with their ids", emptyMap<String, Int>())
        return found
    }

    private fun bpe(model: Fields, vocabulary: Map<String, Int>): Bpe {
        val tokens = arrayOfNulls<String>(vocabulary.values.max() + 1)
        for ((token, id) in vocabulary) tokens[id] = token
        val merges = IntList()
        for ((rank, entry) in model.list("merges").withIndex()) {
            val pair = if (entry is String) entry.split(' ') else (entry as? List<*>)?.map { it.toString() } ?: emptyList()
            if (pair.size != 2) throw model.wrong("merges.$rank", "two tokens", entry)
            for (token in listOf(pair[0], pair[1], pair[0] + pair[1])) {
                merges.add(vocabulary[token] ?: throw model.wrong("merges.$rank", "tokens of the vocabulary", token))
            }
        }
        return Bpe(
            vocabulary, tokens, merges.toArray(), model.flag("ignore_merges", false), model.flag("byte_fallback", false),
            model.textOrNull("unk_token")?.let { vocabulary[it] }, model.flag("fuse_unk", false),
        )
    }

    private fun added(fields: Fields, named: Set<String>): AddedToken {
        val content = fields.text("content")
        val special = fields.flag("special", false) || content in named
        return AddedToken(
            fields.int("id"), content, special, fields.flag("lstrip", false), fields.flag("rstrip", false),
            fields.flag("single_word", false), fields.flag("normalized", !special),
        )
    }

    /** Special tokens by what they are for, from `tokenizer_config.json`. */
    private fun namedTokens(config: Fields): Map<String, List<String>> {
        val content = { value: Any? -> value as? String ?: (value as? Map<*, *>)?.get("content") as? String }
        val names = listOf("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
        val single = names.associateWith { listOfNotNull(content(config.raw(it))) }
        val many = listOf("extra_special_tokens", "additional_special_tokens").associateWith { name ->
            val value = config.raw(name)
            ((value as? List<*>) ?: (value as? Map<*, *>)?.values?.toList() ?: emptyList<Any?>()).mapNotNull(content)
        }
        return single + many
    }

    private fun normalizer(fields: Fields?): TextNormalizer? {
        val forms = forms(fields ?: return null)
        return if (forms.isEmpty()) null else TextNormalizer(forms)
    }

    private fun forms(fields: Fields): List<Normalizer.Form> = when (val type = fields.text("type")) {
        "Sequence" -> fields.objects("normalizers").flatMap(::forms)
        "NFC", "NFD", "NFKC", "NFKD" -> listOf(Normalizer.Form.valueOf(type))
        else -> throw unsupported("normalizer", "NFC, NFD, NFKC, NFKD or none", type)
    }

    private fun isByteLevel(fields: Fields): Boolean = when (fields.text("type")) {
        "ByteLevel" -> true
        "Sequence" -> listOf("pretokenizers", "decoders").any { fields.has(it) && fields.objects(it).any(::isByteLevel) }
        else -> false
    }

    private fun splitter(fields: Fields): Splitter = when (val type = fields.text("type")) {
        "Sequence" -> Splitters.sequence(fields.objects("pretokenizers").map(::splitter))
        "ByteLevel" -> Splitters.byteLevel(fields.flag("add_prefix_space", true), fields.flag("use_regex", true))
        "Digits" -> Splitters.digits(fields.flag("individual_digits", false))
        "Split" -> {
            val pattern = fields.fields("pattern")
            val text = pattern.raw("Regex") as? String ?: throw unsupported("pre_tokenizer.pattern", "a Regex", describe(pattern.raw("String")))
            val (behavior, invert) = fields.text("behavior") to fields.flag("invert", false)
            if (!(behavior == "Isolated" || (behavior == "Removed" && invert))) {
                throw unsupported("pre_tokenizer.behavior", "Isolated, or Removed with invert", "$behavior, invert $invert")
            }
            Splitters.pattern(Patterns.of(text) ?: throw unsupported("pre_tokenizer.pattern", "the pattern of GPT-2, Llama 3 or Qwen 2", text))
        }
        else -> throw unsupported("pre_tokenizer", "ByteLevel, Digits, Split or Sequence", type)
    }

    private fun postProcessor(fields: Fields, before: IntList, after: IntList) {
        when (val type = fields.text("type")) {
            "ByteLevel" -> Unit
            "Sequence" -> fields.objects("processors").forEach { postProcessor(it, before, after) }
            "TemplateProcessing" -> {
                var place = before
                for (part in fields.objects("single")) {
                    if (part.has("Sequence")) {
                        place = after
                    } else {
                        val token = fields.fields("special_tokens").fields(part.fields("SpecialToken").text("id"))
                        token.ints("ids", 0..(1 shl 24)).forEach { place.add(it) }
                    }
                }
            }
            else -> throw unsupported("post_processor", "ByteLevel, TemplateProcessing or Sequence", type)
        }
    }

    private fun text(file: File): String = try {
        Storage.readText(file)
    } catch (error: IOException) {
        throw artifactError("${file.name} cannot be read", "a file in UTF-8", error.message, "copy the artifact again")
    }

    private fun notByteLevel(received: String) =
        artifactError("the app reads byte-level BPE tokenizers only", "a ByteLevel pre-tokenizer and decoder", received, HINT)

    private fun unsupported(field: String, expected: String, received: Any?) =
        artifactError("$NAME: $field is of a kind that the app does not read", expected, received, HINT)

    private const val HINT = "use a model of the SmolLM2, Llama 3 or Qwen 2 family"
}
