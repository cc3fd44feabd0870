package org.ondevice.app

import android.app.ActivityManager
import android.app.AlertDialog
import android.content.Context
import android.content.Intent
import android.net.Uri
import android.view.View
import org.json.JSONObject
import org.ondevice.core.ArtifactInfo
import org.ondevice.core.Manifest
import org.ondevice.core.OndeviceException

/** The artifacts on this phone: what each is, what it needs, and how another one gets here. */
class ModelsScreen(host: MainActivity) : Screen(host) {
    private val watcher: () -> Unit = { render() }

    override fun onShow() = app.jobs.watch(watcher)

    override fun onHide() = app.jobs.unwatch(watcher)

    override fun content(): View {
        val parts = ArrayList<View>()
        parts += ui.title(string(R.string.tab_models))
        parts += ui.text(string(R.string.models_words), 14f, R.color.text_soft)
        val isFree = app.jobs.words(PLACE) == null
        app.jobs.error(PLACE)?.let { error ->
            parts += ui.column(ui.problem(error), ui.button(R.string.dismiss) { app.jobs.dismiss(PLACE) })
        }
        busy(PLACE)?.let { parts += it }
        val zip = ui.button(R.string.import_zip, Tone.PRIMARY) { pickZip() }.apply { id = R.id.import_zip }
        val folder = ui.button(R.string.import_folder) { pickFolder() }.apply { id = R.id.import_folder }
        ui.enable(zip, isFree)
        ui.enable(folder, isFree)
        parts += ui.row(zip, folder)
        val models = app.store.models()
        if (models.isEmpty() && isFree) parts += ui.empty(R.string.no_models, R.string.no_models_words)
        models.forEach { parts += card(it) }
        runtime()?.let { parts += ui.soft(it) }
        return ui.page(R.id.page_models, *parts.toTypedArray())
    }

    private fun card(model: ArtifactInfo): View {
        val delete = ui.button(R.string.delete, Tone.DANGER) { delete(model) }.apply {
            contentDescription = string(R.string.delete_model, model.name)
        }
        val manifest = model.manifest
        if (manifest == null) {
            val problem: OndeviceException? = model.problem
            return ui.card(ui.heading(model.name), ui.notice(string(R.string.model_unusable)), problem?.let(ui::problem) ?: View(host), delete)
        }
        val parts = arrayListOf<View>(
            ui.heading(model.name),
            ui.soft(string(R.string.model_of, manifest.modelSource.ifEmpty { manifest.modelSha256.take(12) }, manifest.method.name, manifest.runtime)),
            ui.fact(string(R.string.on_disk), Words.bytes(host, model.sizeBytes)),
            ui.fact(string(R.string.in_memory), string(R.string.in_memory_value, Words.bytes(host, model.plannedBytes), Words.bytes(host, model.mappedBytes))),
            ui.fact(string(R.string.batch), string(R.string.batch_value, manifest.batchSize, manifest.lengthsTokens.joinToString(", "))),
            ui.fact(string(R.string.adapter), Words.bytes(host, manifest.adapterBytes)),
        )
        places(manifest)?.let { parts += ui.fact(string(R.string.runs_on), it) }
        shortage(model)?.let { parts += ui.notice(it) }
        parts += delete
        return ui.card(*parts.toTypedArray(), gap = 6)
    }

    /** Operators of the training step by backend. */
    private fun places(manifest: Manifest): String? {
        val step = manifest.partition[manifest.stepMethod] ?: return null
        return step.joinToString { string(R.string.operators, it.backend, it.operators) }
    }

    /**
     * A word of warning when the whole phone has less memory than the program maps and plans. A block program's weights
     * need not be in memory at once.
     */
    private fun shortage(model: ArtifactInfo): String? {
        val info = ActivityManager.MemoryInfo()
        (host.getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager).getMemoryInfo(info)
        val need = model.plannedBytes + if (model.manifest?.spec?.blocks == null) model.mappedBytes else 0
        return if (info.totalMem in 1 until need) string(R.string.too_large, Words.bytes(host, need), Words.bytes(host, info.totalMem)) else null
    }

    /** Which ExecuTorch `make apk` packed; a build by Gradle does not say. */
    private fun runtime(): String? {
        val about = try {
            host.assets.open("runtime.json").bufferedReader().use { JSONObject(it.readText()) }
        } catch (_: java.io.FileNotFoundException) {
            return null
        }
        return string(R.string.runtime, about.getString("executorch"), about.getString("name"))
    }

    private fun delete(model: ArtifactInfo) {
        if (app.runs.live?.let { !it.isOver && it.plan.model == model.name } == true) {
            AlertDialog.Builder(host).setMessage(string(R.string.model_in_use, model.name)).setPositiveButton(R.string.ok, null).show()
            return
        }
        AlertDialog.Builder(host).setMessage(string(R.string.delete_model_ask, model.name, Words.bytes(host, model.sizeBytes)))
            .setNegativeButton(R.string.cancel, null)
            .setPositiveButton(R.string.delete) { _, _ -> app.jobs.run(PLACE, string(R.string.deleting), { app.store.library.delete(model.name) }) }
            .show()
    }

    private fun pickZip() {
        host.pick(Intent(Intent.ACTION_OPEN_DOCUMENT).addCategory(Intent.CATEGORY_OPENABLE).setType("*/*"), ZIP)
    }

    private fun pickFolder() = host.pick(Intent(Intent.ACTION_OPEN_DOCUMENT_TREE), FOLDER)

    override fun onPicked(request: Int, uri: Uri) {
        app.import(PLACE, string(R.string.importing_model), sent = false, { imports ->
            if (request == ZIP) {
                imports.open(uri).use { app.store.library.importZip(it, imports.name(uri).removeSuffix(".zip")) }
            } else {
                app.store.library.importFiles(imports.treeName(uri), imports.files(uri))
            }
        })
    }

    companion object {
        const val PLACE = "models"
        const val ZIP = 1
        const val FOLDER = 2
    }
}
