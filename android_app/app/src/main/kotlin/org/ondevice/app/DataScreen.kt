package org.ondevice.app

import android.app.AlertDialog
import android.content.Intent
import android.net.Uri
import android.os.Bundle
import android.text.InputType
import android.text.SpannableStringBuilder
import android.text.Spanned
import android.text.style.BackgroundColorSpan
import android.text.style.ForegroundColorSpan
import android.view.View
import android.widget.EditText
import org.ondevice.core.OndeviceException
import org.ondevice.core.Preview
import org.ondevice.core.Segment
import org.ondevice.core.TypedExample
import java.io.File

/** What can be trained on: imported files and examples typed here, and what of them the model learns. */
class DataScreen(host: MainActivity) : Screen(host) {
    private var opened: String? = null

    /** Index of the example that is edited; -1 for a new one; null when the form is closed. */
    private var editing: Int? = null
    private var previewOf: String? = null
    private var preview: Preview? = null
    private val watcher: () -> Unit = { render() }

    override fun onShow() {
        app.jobs.watch(watcher)
        opened?.let(::loadPreview)
    }

    override fun onHide() = app.jobs.unwatch(watcher)

    override fun save(state: Bundle) {
        state.putString("opened", opened)
        editing?.let {
            state.putInt("editing", it)
            state.putString("prompt", field(R.id.prompt)?.text?.toString())
            state.putString("answer", field(R.id.answer)?.text?.toString())
        }
    }

    private var typed: Pair<String, String>? = null

    override fun restore(state: Bundle) {
        opened = state.getString("opened")
        if (state.containsKey("editing")) {
            editing = state.getInt("editing")
            typed = (state.getString("prompt") ?: "") to (state.getString("answer") ?: "")
        }
    }

    private fun field(id: Int): EditText? = root.findViewById(id)

    override fun content(): View {
        // What is typed outlives a rebuild that background work causes.
        field(R.id.prompt)?.let { typed = it.text.toString() to field(R.id.answer)!!.text.toString() }
        val file = opened?.let(app.store::dataFile)?.takeIf { it.exists() || it == app.store.examples.file }
        return if (file != null) detail(file) else list()
    }

    private fun list(): View {
        val parts = ArrayList<View>()
        parts += ui.title(string(R.string.tab_data))
        parts += ui.text(string(R.string.data_words), 14f, R.color.text_soft)
        app.jobs.error(PLACE)?.let { parts += dismissable(it) }
        busy(PLACE)?.let { parts += it }
        parts += ui.row(
            ui.button(R.string.import_file, Tone.PRIMARY) { pick() }.apply { id = R.id.import_file },
            ui.button(R.string.write_example) { opened = app.store.examples.file.name; edit(-1) }.apply { id = R.id.write_example },
        )
        val files = app.store.dataFiles()
        if (files.isEmpty()) parts += ui.empty(R.string.no_data, R.string.no_data_words)
        for (file in files) {
            val info = ui.text(string(R.string.data_facts, Words.number(app.store.lines(file)), Words.bytes(host, file.length())), 13f, R.color.text_soft)
            parts += ui.card(ui.heading(title(file)), info, gap = 2).apply {
                isClickable = true
                isFocusable = true
                minimumHeight = ui.dp(48)
                contentDescription = string(R.string.open_data, title(file))
                foreground = ui.ripple(ui.shape(android.R.color.transparent, 14))
                setOnClickListener { open(file.name) }
            }
        }
        judged()?.let { parts += it }
        return ui.page(R.id.page_data, *parts.toTypedArray())
    }

    /** What the user thought of the model's answers, newest first; null when nothing was judged. */
    private fun judged(): View? {
        val all = try {
            app.store.judged.read()
        } catch (error: OndeviceException) {
            return ui.problem(error)
        }
        if (all.isEmpty()) return null
        val parts = arrayListOf<View>(ui.heading(string(R.string.judged_answers)), ui.soft(string(R.string.judged_words)))
        for ((index, row) in all.withIndex().reversed()) {
            val thumb = ui.text(if (row.liked) "\uD83D\uDC4D" else "\uD83D\uDC4E", 18f)
            thumb.contentDescription = string(if (row.liked) R.string.thumbs_up else R.string.thumbs_down)
            val texts = ui.column(ui.text(row.prompt, 14f, R.color.text_soft), ui.text(row.answer.trim(), 15f), gap = 2)
            val delete = ui.button(R.string.delete, Tone.DANGER) {
                confirm(string(R.string.delete_judged_ask, index + 1)) {
                    app.store.judged.delete(index)
                    render()
                }
            }
            delete.contentDescription = string(R.string.delete_judged, index + 1)
            parts += ui.row(thumb, texts, delete, stretched = setOf(texts), gap = 12)
        }
        return ui.card(*parts.toTypedArray(), gap = 12).apply { id = R.id.judged }
    }

    private fun title(file: File) = if (file == app.store.examples.file) string(R.string.own_examples) else file.name

    private fun dismissable(error: OndeviceException): View =
        ui.column(ui.problem(error), ui.button(R.string.dismiss) { app.jobs.dismiss(PLACE) }, gap = 8)

    private fun open(name: String) {
        opened = name
        previewOf = null
        render()
        loadPreview(name)
    }

    private fun loadPreview(name: String) {
        val file = app.store.dataFile(name)
        val model = app.store.models().firstOrNull { it.manifest != null }
        if (model == null || !file.isFile || file.length() == 0L) {
            preview = null
            previewOf = name
            render()
            return
        }
        app.jobs.run(PLACE, string(R.string.reading), { app.store.preview(model, file) }) {
            preview = it
            previewOf = name
        }
    }

    private fun detail(file: File): View {
        val own = file == app.store.examples.file
        val parts = ArrayList<View>()
        parts += ui.row(
            ui.button(R.string.back) { close() }.apply { id = R.id.back },
            ui.title(title(file)),
            stretched = emptySet(), gap = 12,
        )
        app.jobs.error(PLACE)?.let { parts += dismissable(it) }
        busy(PLACE)?.let { parts += it }
        if (editing != null) parts += form()
        if (own) parts += examples()
        val shown = preview?.takeIf { previewOf == file.name }
        if (shown != null) parts += summary(shown)
        else if (previewOf == file.name && file.isFile) parts += ui.notice(string(R.string.preview_needs_model), Tone.PLAIN)
        if (file.isFile) parts += ui.button(R.string.delete_data, Tone.DANGER) { delete(file) }.apply { id = R.id.delete }
        return ui.page(R.id.page_data, *parts.toTypedArray())
    }

    private fun close() {
        opened = null
        editing = null
        typed = null
        preview = null
        render()
    }

    private fun examples(): View {
        val parts = ArrayList<View>()
        val stored = try {
            app.store.examples.read()
        } catch (error: OndeviceException) {
            return ui.problem(error)
        }
        if (stored.isEmpty()) parts += ui.empty(R.string.no_examples, R.string.no_examples_words)
        for ((index, example) in stored.withIndex()) {
            val edit = ui.button(R.string.edit) { edit(index) }.apply { contentDescription = string(R.string.edit_number, index + 1) }
            val delete = ui.button(R.string.delete, Tone.DANGER) { deleteExample(index) }
            delete.contentDescription = string(R.string.delete_number, index + 1)
            val texts = ui.column(ui.text(example.prompt.ifEmpty { "—" }, 14f, R.color.text_soft), ui.text(example.completion.trim(), 15f), gap = 2)
            parts += ui.card(texts, ui.row(edit, delete), gap = 10)
        }
        if (editing == null) parts += ui.button(R.string.write_example, Tone.PRIMARY) { edit(-1) }.apply { id = R.id.write_example }
        return ui.column(*parts.toTypedArray(), gap = 10)
    }

    private fun edit(index: Int) {
        editing = index
        val stored = app.store.examples.read().getOrNull(index)
        typed = (stored?.prompt ?: "") to (stored?.completion?.trim() ?: "")
        field(R.id.prompt)?.setText(typed!!.first)
        field(R.id.answer)?.setText(typed!!.second)
        render()
    }

    private fun form(): View {
        val text = InputType.TYPE_CLASS_TEXT
        val prompt = ui.field(R.id.prompt, R.string.prompt, text, lines = 2).apply { setText(typed?.first ?: ""); isSaveEnabled = false }
        val answer = ui.field(R.id.answer, R.string.answer, text, lines = 2).apply { setText(typed?.second ?: ""); isSaveEnabled = false }
        return ui.card(
            ui.heading(string(if (editing == -1) R.string.new_example else R.string.edit_example)),
            ui.labelled(R.string.prompt, prompt),
            ui.labelled(R.string.answer, answer),
            ui.row(
                ui.button(R.string.save, Tone.PRIMARY) { keep(prompt, answer) }.apply { id = R.id.save },
                ui.button(R.string.cancel) { leaveForm() },
            ),
        )
    }

    private fun leaveForm() {
        editing = null
        typed = null
        root.removeAllViews()
        render()
    }

    /** The answer follows the prompt with a space, as a text goes on. */
    private fun keep(prompt: EditText, answer: EditText) {
        val question = prompt.text.toString()
        val words = answer.text.toString().trim()
        val gap = question.isEmpty() || question.last().isWhitespace()
        val example = TypedExample(question, if (gap || words.isEmpty()) words else " $words")
        try {
            val index = editing ?: return
            if (index < 0) app.store.examples.add(example) else app.store.examples.replace(index, example)
        } catch (error: OndeviceException) {
            app.jobs.fail(PLACE, error)
            return
        }
        app.jobs.dismiss(PLACE)
        leaveForm()
        opened?.let(::loadPreview)
    }

    private fun deleteExample(index: Int) {
        confirm(string(R.string.delete_example_ask, index + 1)) {
            app.store.examples.delete(index)
            opened?.let(::loadPreview)
        }
    }

    private fun delete(file: File) = confirm(string(R.string.delete_ask, title(file))) {
        app.store.deleteData(file)
        close()
    }

    private fun confirm(question: String, action: () -> Unit) {
        AlertDialog.Builder(host).setMessage(question)
            .setNegativeButton(R.string.cancel, null)
            .setPositiveButton(R.string.delete) { _, _ -> action() }
            .show()
    }

    private fun summary(preview: Preview): View {
        val parts = ArrayList<View>()
        parts += ui.heading(string(R.string.what_is_learned))
        val format = listOfNotNull(preview.format.formatName, preview.task, preview.template.ifEmpty { null })
        parts += ui.fact(string(R.string.format), format.distinct().joinToString(", "))
        parts += ui.fact(string(R.string.rows), string(R.string.rows_used, Words.number(preview.sequences), Words.number(preview.rows)))
        parts += ui.fact(string(R.string.lengths), string(R.string.lengths_value, preview.medianTokens, preview.longestTokens, preview.maxLengthTokens))
        parts += ui.fact(string(R.string.trained_tokens), Words.number(preview.trainedTokens))
        if (preview.labels.isNotEmpty()) parts += ui.fact(string(R.string.labels), preview.labels.entries.joinToString { "${it.key} ${it.value}" })
        if (preview.unread.isNotEmpty()) {
            val named = preview.unread.entries.joinToString(", ") { (name, count) -> "$name ($count)" }
            parts += ui.notice(string(R.string.not_read, named), Tone.PLAIN)
        }
        if (preview.truncated > 0) parts += ui.notice(host.resources.getQuantityString(R.plurals.truncated, preview.truncated, preview.truncated))
        if (preview.problems.isNotEmpty()) {
            val count = preview.problems.size
            val lines = listOf(host.resources.getQuantityString(R.plurals.left_out, count, count)) + preview.problems.take(5)
            parts += ui.notice((lines + if (count > 5) listOf(string(R.string.and_more, count - 5)) else emptyList()).joinToString("\n"))
        }
        parts += ui.soft(string(R.string.highlighted))
        for (example in preview.examples) {
            parts += ui.text(highlighted(example), 14f).apply {
                background = ui.shape(R.color.background, 10, R.color.outline)
                setPadding(ui.dp(12), ui.dp(10), ui.dp(12), ui.dp(10))
                val (learned, given) = example.partition { it.trained }
                contentDescription = string(R.string.example_words, given.joinToString("") { it.text }, learned.joinToString("") { it.text })
            }
        }
        return ui.card(*parts.toTypedArray(), gap = 8).apply { id = R.id.preview }
    }

    private fun highlighted(example: List<Segment>): CharSequence = SpannableStringBuilder().apply {
        for (segment in example) {
            val from = length
            append(segment.text)
            if (segment.trained) setSpan(BackgroundColorSpan(ui.color(R.color.trained)), from, length, Spanned.SPAN_EXCLUSIVE_EXCLUSIVE)
            else setSpan(ForegroundColorSpan(ui.color(R.color.text_soft)), from, length, Spanned.SPAN_EXCLUSIVE_EXCLUSIVE)
        }
    }

    private fun pick() {
        val intent = Intent(Intent.ACTION_OPEN_DOCUMENT).addCategory(Intent.CATEGORY_OPENABLE).setType("*/*")
        host.pick(intent, PICK_FILE)
    }

    override fun onPicked(request: Int, uri: Uri) {
        app.import(PLACE, string(R.string.importing), sent = false, { imports ->
            imports.open(uri).use { app.store.importData(imports.name(uri), it) }
        }) { open(it.name) }
    }

    companion object {
        const val PLACE = "data"
        private const val PICK_FILE = 1
    }
}
